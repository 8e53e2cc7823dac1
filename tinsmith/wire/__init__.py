"""The Tinker wire format: protobuf and JSON in, protobuf out. Knows neither HTTP nor torch."""
