"""Trains a policy on trajectories. Imports torch, transformers and safetensors only."""
