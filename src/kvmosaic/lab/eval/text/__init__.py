"""Generated text about invented things: names, values, sentences, documents and questions."""
