"""The solution checker: a second implementation of the rules that shares only the graph with the planner."""
