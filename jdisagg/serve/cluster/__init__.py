"""Workers in other processes: the control link between them and the router's process, and what travels on it."""
