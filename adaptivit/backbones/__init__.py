"""Backbone families: how a model embeds images, runs a block and reads out."""
