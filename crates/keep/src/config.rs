//! How much a keeper holds.

/// The limits of a keeper.
#[derive(Clone, Debug)]
pub struct KeeperConfig {
    /// Bytes of all models.
    pub memory: u64,
    /// Percent of them that the models of one user may take.
    pub user_percent: u32,
    /// Connections at a time.
    pub connections: usize,
    /// Of them, those of one user.
    pub user_connections: usize,
    /// Descriptors of the models of one user, and of those that it is sending.
    pub user_descriptors: usize,
}

impl Default for KeeperConfig {
    fn default() -> Self {
        Self { memory: 0, user_percent: 100, connections: 256, user_connections: 256, user_descriptors: 768 }
    }
}

impl KeeperConfig {
    /// Bytes of the models of one user.
    pub(crate) fn of_a_user(&self) -> u64 {
        u64::try_from(u128::from(self.memory) * u128::from(self.user_percent.min(100)) / 100).unwrap_or(self.memory)
    }
}
