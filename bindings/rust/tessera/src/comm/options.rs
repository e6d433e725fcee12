//! Settings of a communicator.

use std::time::Duration;

use crate::settings::{comm_setters, CommSettings};

/// Settings of a [`Comm`](crate::Comm). Settings that are not set have the library's defaults.
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
