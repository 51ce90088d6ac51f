"""Plans of a graph: from textbook schedules to annealing and integer programs."""
