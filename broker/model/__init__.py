"""What exists and what may be done with it: one library for the controller and every front door."""
