"""Run jobs on clusters: restart them after a crash, on the hosts that are left."""
