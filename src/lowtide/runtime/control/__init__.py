"""Units begin and end here: what each is to do is chosen, put on, and learnt from."""
