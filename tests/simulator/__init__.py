"""Simulate whole runs in one process: seeded order of steps, virtual time, and faults."""
