"""One module for each kind of drafter; each registers its class."""
