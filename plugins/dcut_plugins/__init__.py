"""Operations that TensorRT lacks, each in a room of its own."""
