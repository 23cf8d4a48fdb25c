"""How `pallas_call.trace` reads traced code: one module a question."""
