//! Calls of Vulkan that fail on command, for the tests of this crate; elsewhere nothing is left of it.

use crate::error::CallError;

/// Counts calls, and makes some of them fail.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    #[cfg(test)]
    state: std::sync::Mutex<State>,
}

#[cfg(test)]
#[derive(Debug, Default)]
struct State {
    calls: u64,
    fails: Option<Failing>,
    failed: Option<&'static str>,
    /// Functions that were called since.
    called: std::collections::BTreeSet<&'static str>,
}

#[cfg(test)]
#[derive(Debug)]
struct Failing {
    /// Only calls of this function count.
    call: Option<&'static str>,
    number: u64,
    /// All later ones fail, too.
    for_good: bool,
    result: ash::vk::Result,
}

impl Faults {
    /// Asked before each call that can fail: the error, when this is the call that fails.
    #[inline]
    fn before(&self, call: &'static str) -> Result<(), CallError> {
        #[cfg(test)]
        {
            let mut state = self.state.lock().unwrap();
            let State { calls, fails, failed, called } = &mut *state;
            called.insert(call);
            if let Some(failing) = fails.as_mut().filter(|failing| failing.call.is_none_or(|of| of == call)) {
                *calls += 1;
                if failing.for_good && *calls == failing.number {
                    failing.call = None; // from here on, all others too
                }
                if *calls == failing.number || (failing.for_good && *calls > failing.number) {
                    failed.get_or_insert(call);
                    return Err(CallError { call, result: failing.result });
                }
            }
        }
        let _ = call;
        Ok(())
    }

    /// Makes a call that can fail.
    ///
    /// # Errors
    /// The driver's answer with the name of the call.
    pub fn call<T>(&self, call: &'static str, f: impl FnOnce() -> Result<T, ash::vk::Result>) -> Result<T, CallError> {
        self.before(call)?;
        f().map_err(|result| CallError { call, result })
    }

    /// Makes the call of this number fail, counted from 1 and from now on.
    #[cfg(test)]
    pub fn fail(&self, number: u64, result: ash::vk::Result) {
        self.set(Some(Failing { call: None, number, for_good: false, result }));
    }

    /// Makes the next call of a function fail.
    #[cfg(test)]
    pub fn fail_call(&self, call: &'static str, result: ash::vk::Result) {
        self.fail_later_call(call, 1, result);
    }

    /// Makes one of the next calls of a function fail, counted from 1.
    #[cfg(test)]
    pub fn fail_later_call(&self, call: &'static str, number: u64, result: ash::vk::Result) {
        self.set(Some(Failing { call: Some(call), number, for_good: false, result }));
    }

    /// Makes all calls fail from now on.
    #[cfg(test)]
    pub fn fail_for_good(&self, result: ash::vk::Result) {
        self.set(Some(Failing { call: None, number: 1, for_good: true, result }));
    }

    /// Makes all calls fail from the next one of a function on.
    #[cfg(test)]
    pub fn fail_for_good_from(&self, call: &'static str, result: ash::vk::Result) {
        self.set(Some(Failing { call: Some(call), number: 1, for_good: true, result }));
    }

    /// Lets all calls work again.
    #[cfg(test)]
    pub fn heal(&self) {
        self.set(None);
    }

    #[cfg(test)]
    fn set(&self, fails: Option<Failing>) {
        *self.state.lock().unwrap() = State { fails, ..State::default() };
    }

    /// True if a function was called since calls were last made to fail or to work.
    #[cfg(test)]
    pub fn called(&self, call: &str) -> bool {
        self.state.lock().unwrap().called.contains(call)
    }

    /// The first call that was made to fail, once it was made.
    #[cfg(test)]
    pub fn failed(&self) -> Option<&'static str> {
        self.state.lock().unwrap().failed
    }
}
