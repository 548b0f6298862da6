"""The imperative shell around the controller: keeps the record, feeds events, carries out commands, answers."""
