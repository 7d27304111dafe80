//! Device virtual memory: bind and unbind page ranges of buffer objects, committed whole or not at all
