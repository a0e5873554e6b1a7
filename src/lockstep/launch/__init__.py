"""Processes and machines: starts ranks, monitors them, restarts them. `several_nodes.py`, `preflight/` (checks of
machines), `device_check/` (known answers), `cluster/` (SLURM, Kubernetes, SSH)."""
