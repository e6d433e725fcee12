//! Settings of a communicator.

use std::time::Duration;

use crate::settings::{comm_setters, CommSettings};

/// Settings of a [`Comm`](crate::Comm). What is not set is the library's default.
#[derive(Clone, Debug, Default)]
pub struct CommOptions {
    pub(super) settings: CommSettings,
}

impl CommOptions {
    /// All defaults.
    pub fn new() -> Self {
        Self::default()
    }

    comm_setters!();
}
