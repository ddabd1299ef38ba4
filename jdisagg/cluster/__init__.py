"""The place of a process in a worker group, and the jobs that schedulers start, as text and numbers."""
