"""Tandem's command as a Python module: ``python -m tandem`` runs the binary that the wheel installed."""
