"""What developers measure in a checkout; no part of the product."""
