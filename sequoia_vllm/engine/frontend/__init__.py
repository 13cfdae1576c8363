"""What runs in the front end: options, refusals, choice of draft and tree."""
