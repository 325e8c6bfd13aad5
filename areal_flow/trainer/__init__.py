"""Trajectories in, a new policy out. Imports torch, transformers and safetensors only."""
