"""Throughput and latency beside static baselines."""
