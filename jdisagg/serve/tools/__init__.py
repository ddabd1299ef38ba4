"""Tools: what an answer says, thinks and calls, told apart."""
