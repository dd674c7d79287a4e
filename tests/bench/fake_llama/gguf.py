"""A fake `gguf`, as far as the worker uses it: the file is JSON with what was added."""

import json


class GGMLQuantizationType:
    BF16 = 30


class GGUFWriter:
    def __init__(self, path, architecture):
        self._path, self._content = path, {"architecture": architecture, "tensors": {}}

    def add_tensor(self, name, values, raw_dtype=None):
        self._content["tensors"][name] = [list(values.shape), str(values.dtype), raw_dtype]

    def __getattr__(self, name):
        assert name.startswith("add_")
        return lambda value: self._content.update({name.removeprefix("add_"): value})

    def write_header_to_file(self):
        pass

    def write_kv_data_to_file(self):
        pass

    def write_tensors_to_file(self):
        self._path.write_text(json.dumps(self._content))

    def close(self):
        pass
