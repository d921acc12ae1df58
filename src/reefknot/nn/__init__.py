"""Tables, inputs, classifiers, outputs, encoders and models, as PyTorch modules."""
