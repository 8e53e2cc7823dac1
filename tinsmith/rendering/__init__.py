"""Renders the chunks of a ModelInput to token ids, image spans and pixel values. The only place that does this."""
