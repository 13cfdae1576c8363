"""Growing trees on Model Runner V2."""
