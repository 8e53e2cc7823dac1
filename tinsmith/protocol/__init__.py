"""What server, engine, workers and samplers say to each other. No torch."""
