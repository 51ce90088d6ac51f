"""Lower bounds on peak and time that hold for every plan, with the program points that prove them."""
