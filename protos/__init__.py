"""The contract: protobuf definitions and the code generated from them."""
