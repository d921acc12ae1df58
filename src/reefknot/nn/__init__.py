"""What `import reefknot` offers: tables, inputs, classifiers, outputs, encoders and models as PyTorch modules."""
