"""What is done with saved sessions: looked at, run again, compared, shown as a report, exported."""
