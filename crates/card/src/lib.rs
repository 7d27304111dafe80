//! The software card: register map, device model, and its host driver as a Channel
