"""Where a process stands among others: its place in a group, and the jobs that schedulers start; text and numbers."""
