"""The shared libraries seen from Python: where they lie, their C ABI, their rows, the devices they run on."""
