"""Plans one recorded unit for the runtime: order is fixed, values are away in gaps and return when needed."""
