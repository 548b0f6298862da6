"""Puts agents on hosts and carries messages between them, the runner and clients. The only place that knows Dask."""
