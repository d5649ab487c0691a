"""The mathematics that both halves of secure aggregation share."""
