"""A worker that spans processes: its leader, its members, and the ordered stream between them."""
