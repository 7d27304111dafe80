//! Calls of Vulkan that fail on command, for the tests of this crate; elsewhere nothing is left of it.

use crate::error::CallError;

/// Counts calls, and makes one of them fail.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    #[cfg(test)]
    state: std::sync::Mutex<State>,
}

#[cfg(test)]
#[derive(Debug, Default)]
struct State {
    calls: u64,
    fails: Option<(u64, ash::vk::Result)>,
    failed: Option<&'static str>,
}

impl Faults {
    /// To be asked before each call that can fail.
    ///
    /// # Errors
    /// When this is the call that fails.
    #[inline]
    pub fn before(&self, call: &'static str) -> Result<(), CallError> {
        #[cfg(test)]
        {
            let mut state = self.state.lock().unwrap();
            state.calls += 1;
            if let Some((at, result)) = state.fails
                && at == state.calls
            {
                state.failed = Some(call);
                return Err(CallError { call, result });
            }
        }
        let _ = call;
        Ok(())
    }

    /// Makes the call of this number fail, counted from 1 and from now on.
    #[cfg(test)]
    pub fn fail(&self, number: u64, result: ash::vk::Result) {
        *self.state.lock().unwrap() = State { calls: 0, fails: Some((number, result)), failed: None };
    }

    /// The call that was made to fail, once it was made.
    #[cfg(test)]
    pub fn failed(&self) -> Option<&'static str> {
        self.state.lock().unwrap().failed
    }
}
