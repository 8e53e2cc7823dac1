"""Messages and links between server, engine, workers and samplers. No torch."""
