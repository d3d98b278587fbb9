"""Storage tiers for encoded pages."""
