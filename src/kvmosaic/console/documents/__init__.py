"""The command `kvmosaic documents`: the documents that a running server stores."""
