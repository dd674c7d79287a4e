"""The llama.cpp engine: our scheduler, cache and faces over llama.cpp's arithmetic, unpatched."""
