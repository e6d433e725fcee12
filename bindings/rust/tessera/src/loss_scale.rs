//! DeepSpeed's loss scale.

use std::fmt;
use std::ptr::{self, NonNull};

use tessera_sys as sys;

use crate::callback::CallbackResult;
use crate::error::{check, Error, Result};
use crate::raw::created;
use crate::settings::{loss_scale_setters, LossScaleSettings};
use crate::state::{StateDict, Stateful};
use crate::value::Value;

/// DeepSpeed's loss scale, for trainers that check gradients and make steps without an [`Engine`](crate::Engine); see also
/// [`GradScaler`](crate::GradScaler). Multiply each loss by [`value`](Self::value), and call [`update`](Self::update) after
/// each step. A dynamic scale halves after `hysteresis` overflows and doubles after `window` steps without one. Each rank
/// has its own; they stay equal if all get the same updates. In an `Rc<RefCell<_>>` a [`State`](crate::State) saves it.
///
/// ```
/// # fn main() -> tessera::Result<()> {
/// use tessera::LossScale;
/// let mut scale = LossScale::builder().initial(4.0).hysteresis(1).build()?;
/// assert_eq!(scale.update(true)?, 2.0);
/// assert_eq!(scale.value()?, 2.0);
/// # Ok(()) }
/// ```
pub struct LossScale(NonNull<sys::tsr_loss_scale>);

impl Drop for LossScale {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and not used again.
        unsafe { sys::tsr_loss_scale_destroy(self.as_ptr()) }
    }
}

/// Builds a [`LossScale`]. Settings that are not set have the library's defaults, which are DeepSpeed's. Scales are positive
/// normal `f32` numbers. The same on every rank.
#[derive(Debug, Default)]
#[must_use = "it is a builder: call build()"]
pub struct LossScaleBuilder {
    settings: LossScaleSettings,
}

impl LossScaleBuilder {
    loss_scale_setters!();

    /// Creates the loss scale.
    ///
    /// # Errors
    /// `InvalidArgument`: a setting is invalid.
    pub fn build(self) -> Result<LossScale> {
        crate::load()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the options are borrowed for the call.
        self.settings.with_raw(|raw| check(unsafe { sys::tsr_loss_scale_create(raw, &mut handle) }))?;
        Ok(LossScale(created(handle)?))
    }
}

impl LossScale {
    /// Starts building a loss scale.
    pub fn builder() -> LossScaleBuilder {
        LossScaleBuilder::default()
    }

    fn as_ptr(&self) -> *mut sys::tsr_loss_scale {
        self.0.as_ptr()
    }

    /// The factor for losses.
    ///
    /// # Errors
    /// None in practice.
    pub fn value(&self) -> Result<f64> {
        let mut value = 0.0;
        // SAFETY: the handle is alive and used by this thread alone; so in every method below.
        check(unsafe { sys::tsr_loss_scale_value(self.as_ptr(), &mut value) })?;
        Ok(value)
    }

    /// Ends a step. `overflow`: whether the gradients of any rank had an infinity or NaN; the same on every rank. Returns the
    /// next scale.
    ///
    /// # Errors
    /// `InvalidState`: it must halve, but is at its minimum; nothing has changed.
    pub fn update(&mut self, overflow: bool) -> Result<f64> {
        let mut value = 0.0;
        check(unsafe { sys::tsr_loss_scale_update(self.as_ptr(), i32::from(overflow), &mut value) })?;
        Ok(value)
    }

    fn set_state(&self, values: &StateDict) -> Result<()> {
        let state = sys::tsr_loss_scale_state {
            struct_size: size_of::<sys::tsr_loss_scale_state>(),
            scale: number(values, SCALE)?,
            iteration: integer(values, ITERATION)?,
            last_overflow: integer(values, LAST_OVERFLOW)?,
            hysteresis: integer(values, HYSTERESIS)?,
        };
        check(unsafe { sys::tsr_loss_scale_set_state(self.as_ptr(), &state) })
    }
}

const SCALE: &str = "scale";
const ITERATION: &str = "iteration";
const LAST_OVERFLOW: &str = "last_overflow";
const HYSTERESIS: &str = "hysteresis";

fn missing(values: &StateDict, name: &str, kind: &str) -> Error {
    match values.get(name) {
        Some(value) => Error::argument(format!("the saved {name:?} of a loss scale is {value:?}, not {kind}")),
        None => Error::argument(format!("the state of a loss scale lacks {name:?}")),
    }
}

fn number(values: &StateDict, name: &str) -> Result<f64> {
    match values.get(name) {
        Some(Value::Double(value)) => Ok(*value),
        Some(Value::Int(value)) => Ok(*value as f64),
        _ => Err(missing(values, name, "a number")),
    }
}

fn integer(values: &StateDict, name: &str) -> Result<i64> {
    match values.get(name) {
        Some(Value::Int(value)) => Ok(*value),
        _ => Err(missing(values, name, "an integer of 64 bits")),
    }
}

/// "scale"; "iteration": the number of updates; "last_overflow": the iteration of the last overflow, or -1; "hysteresis": the
/// overflows left until it halves. A fixed scale stays as it was built.
impl Stateful for LossScale {
    fn state_dict(&self) -> CallbackResult<StateDict> {
        let mut state = sys::tsr_loss_scale_state {
            struct_size: size_of::<sys::tsr_loss_scale_state>(),
            scale: 0.0,
            iteration: 0,
            last_overflow: 0,
            hysteresis: 0,
        };
        check(unsafe { sys::tsr_loss_scale_get_state(self.as_ptr(), &mut state) })?;
        let values: [(&str, Value); 4] = [
            (SCALE, state.scale.into()),
            (ITERATION, state.iteration.into()),
            (LAST_OVERFLOW, state.last_overflow.into()),
            (HYSTERESIS, state.hysteresis.into()),
        ];
        Ok(values.map(|(name, value)| (name.to_owned(), value)).into())
    }

    fn check_state_dict(&self, values: &StateDict) -> CallbackResult<()> {
        Ok(Self::builder().build()?.set_state(values)?)
    }

    fn load_state_dict(&mut self, values: StateDict) -> CallbackResult<()> {
        Ok(self.set_state(&values)?)
    }
}

impl fmt::Debug for LossScale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LossScale").field("value", &self.value().ok()).finish()
    }
}
