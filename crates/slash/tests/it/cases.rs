//! The cases of SLASH's own driver tests (`driver/tests/test_slash_qdma.c`), as a table: what the model answers, or why
//! only the card can answer it.
