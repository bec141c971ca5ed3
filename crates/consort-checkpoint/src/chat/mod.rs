//! Chat templates: from messages to the token ids that a model was trained to see.
//!
//! Models are published with a Jinja template for `transformers`. It is rendered here in an environment that behaves the same, and
//! the result is encoded so that control tokens come from the template alone: whatever a user types stays text.

mod charge;
mod environment;
mod guard;
mod json;
mod load;
mod messages;
mod methods;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use minijinja::value::{Enumerator, Object};
use minijinja::{Environment, ErrorKind, Value};
use serde_json::{Map, Value as Json, json};

use crate::CheckpointError;
use crate::tokenizer::{Tokenizer, TokenizerError};
use guard::Guard;
use messages::{Arguments, SystemLayout, Traits};

/// Name of the template that is used where no other is asked for.
const DEFAULT: &str = "default";

/// Tells the time to templates that print the date.
pub type Clock = dyn Fn() -> jiff::ZonedDateTime + Send + Sync;

/// Why a conversation could not be turned into a prompt.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// A file that cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A template that is no Jinja, or asks for what doesn't exist.
    #[error("{place}: chat template: {reason}")]
    Template {
        /// The file or metadata key.
        place: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The template refuses the conversation, in its own words.
    #[error("the model's chat template refuses this conversation: {0}")]
    Refused(String),
    /// The template ran for too long.
    #[error("the model's chat template needs too much work for this conversation")]
    TooMuchWork,
    /// A message that no template could take.
    #[error("messages[{index}]: {reason}")]
    Message {
        /// Position in the list.
        index: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// The prompt could not be encoded.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// The stack of a thread that renders. A template can nest lists as often as its fuel lasts, and each level takes some stack
/// when they are dropped. Only what is touched takes memory.
const STACK_BYTES: usize = 1 << 30;

/// A conversation, and what is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Conversation<'a> {
    /// Messages in the form of OpenAI's chat API: `role`, `content` (text or text parts), `tool_calls`, ...
    pub messages: &'a [Json],
    /// Tools that the model may call, as JSON schemas; empty for none.
    pub tools: &'a [Json],
    /// Ends the prompt where the assistant begins to speak.
    pub add_generation_prompt: bool,
    /// Further variables of the template: `enable_thinking`, `reasoning_effort`, ...
    pub variables: &'a Map<String, Json>,
}

/// A prompt as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The whole.
    pub text: String,
    /// Where control tokens count, for [`Tokenizer::encode_parts`].
    pub scaffold: Vec<Range<usize>>,
}

/// A model's chat templates.
pub struct ChatTemplate {
    environment: Environment<'static>,
    sources: BTreeMap<String, String>,
    traits: BTreeMap<String, Traits>,
}

impl ChatTemplate {
    /// Compiles templates by name; `place` says in errors where they come from. `None` if there are none.
    ///
    /// # Errors
    /// A template that is no Jinja.
    pub fn new(sources: BTreeMap<String, String>, place: &str) -> Result<Option<Self>, ChatError> {
        if sources.is_empty() {
            return Ok(None);
        }
        let mut template = Self { environment: environment::environment(), sources, traits: BTreeMap::new() };
        for (name, source) in &template.sources {
            let invalid = |reason: String| ChatError::Template { place: place.to_owned(), reason };
            let source = environment::without_generation_tags(source);
            let source = charge::charged(&source).map_err(invalid)?;
            template
                .environment
                .add_template_owned(name.clone(), source)
                .map_err(|error| invalid(error.to_string()))?;
        }
        template.traits = template.sources.keys().map(|name| (name.clone(), template.probe(name))).collect();
        Ok(Some(template))
    }

    /// Replaces the clock that templates ask for the date.
    pub fn set_clock(&mut self, clock: Arc<Clock>) {
        environment::set_clock(&mut self.environment, clock);
    }

    /// The source that a conversation with or without tools is rendered with.
    pub fn source(&self, tools: bool) -> &str {
        &self.sources[self.name(tools)]
    }

    /// The prompt as token ids. The template alone decides about the beginning-of-text token.
    ///
    /// # Errors
    /// A conversation that the template refuses, or that no template could take.
    pub fn encode(&self, tokenizer: &Tokenizer, conversation: &Conversation) -> Result<Vec<u32>, ChatError> {
        let prompt = self.render(tokenizer, conversation)?;
        Ok(tokenizer.encode_parts(&prompt.text, &prompt.scaffold)?)
    }

    /// The prompt as text.
    ///
    /// # Errors
    /// Like [`ChatTemplate::encode`].
    pub fn render(&self, tokenizer: &Tokenizer, conversation: &Conversation) -> Result<Prompt, ChatError> {
        let name = self.name(!conversation.tools.is_empty());
        let traits = self.traits[name];
        let messages = messages::normalize(conversation.messages, traits, &self.sources[name])?;
        let given = [json!(conversation.messages), json!(conversation.tools), json!(conversation.variables)];
        let given = given.map(|value| value.to_string()).concat();
        let guard = Guard::new(tokenizer, |mark| given.contains(mark) || self.sources[name].contains(mark))
            .ok_or_else(|| ChatError::Refused("it uses every character that Unicode leaves unused".to_owned()))?;

        let mut variables = Map::new();
        variables.extend(tokenizer.named_tokens().iter().map(|(name, text)| (name.clone(), json!(text))));
        variables.extend(conversation.variables.iter().map(|(key, value)| (key.clone(), guard.whole_tokens(value))));
        variables.insert("add_generation_prompt".to_owned(), json!(conversation.add_generation_prompt));
        let tools = (!conversation.tools.is_empty()).then(|| guard.value(&json!(conversation.tools)));
        variables.insert("tools".to_owned(), tools.unwrap_or_default());

        let instructs = messages.iter().any(messages::is_system);
        let calls = messages.iter().any(|message| message.contains_key("tool_calls"));
        let layouts = [SystemLayout::AsGiven, SystemLayout::Merged, SystemLayout::InFirstUserMessage];
        let mut refusal = None;
        for arguments in [Arguments::Mapping, Arguments::Text].into_iter().take(if calls { 2 } else { 1 }) {
            for layout in layouts.into_iter().take(if instructs { 3 } else { 1 }) {
                let Some(messages) = messages::lay_out(&messages, layout, traits) else { continue };
                let messages: Vec<Json> = messages
                    .iter()
                    .map(|message| guard.message(&messages::with_arguments(message, arguments)))
                    .collect();
                match self.try_render(name, &messages, &variables) {
                    // Some templates pass over a system message in silence.
                    Ok(text) if layout == SystemLayout::InFirstUserMessage || shows_instructions(&text, &messages) => {
                        let (text, scaffold) = guard.remove(&text);
                        return Ok(Prompt { text, scaffold });
                    }
                    Ok(_) => {}
                    Err(ChatError::TooMuchWork) => return Err(ChatError::TooMuchWork),
                    Err(error) => refusal = refusal.or(Some(error)),
                }
            }
        }
        Err(refusal.unwrap_or_else(|| ChatError::Refused("it has no place for system messages".to_owned())))
    }

    /// As `transformers` chooses: the template for tools if there is one and tools are given.
    fn name(&self, tools: bool) -> &str {
        let wanted = if tools { ["tool_use", DEFAULT] } else { [DEFAULT, DEFAULT] };
        let found = wanted.into_iter().find_map(|name| self.sources.get_key_value(name));
        found.or(self.sources.first_key_value()).map_or(DEFAULT, |(name, _)| name)
    }

    fn try_render(&self, name: &str, messages: &[Json], variables: &Map<String, Json>) -> Result<String, ChatError> {
        let render = || self.render_here(name, messages, variables);
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, render);
            let thread = thread.map_err(|error| ChatError::Refused(format!("no thread to render it: {error}")))?;
            // A panic there is one here.
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn render_here(&self, name: &str, messages: &[Json], variables: &Map<String, Json>) -> Result<String, ChatError> {
        let messages: Value = messages.iter().map(to_value).collect();
        let context = variables.iter().map(|(key, value)| (key.clone(), to_value(value)));
        let context = Value::from_pairs(context.chain([("messages".to_owned(), messages)]));
        let template = self.environment.get_template(name).map_err(|error| refused(&error))?;
        template.render(context).map_err(|error| refused(&error))
    }

    /// Finds out what a template wants by showing it a message.
    fn probe(&self, name: &str) -> Traits {
        const PROBE: &str = "probe";
        let shows = |content: Json| {
            let messages = [json!({"role": "user", "content": content})];
            self.try_render(name, &messages, &Map::new()).is_ok_and(|text| text.contains(PROBE))
        };
        Traits {
            developer: self.sources[name].contains("developer"),
            parts: !shows(json!(PROBE)) && shows(json!([{"type": "text", "text": PROBE}])),
        }
    }
}

/// Whether all instructions are in the prompt. Templates trim them.
fn shows_instructions(rendered: &str, messages: &[Json]) -> bool {
    let instructions = messages.iter().filter_map(Json::as_object).filter(|message| messages::is_system(message));
    instructions.map(messages::text_of).all(|text| rendered.contains(text.trim()))
}

fn refused(error: &minijinja::Error) -> ChatError {
    match error.kind() {
        ErrorKind::OutOfFuel => ChatError::TooMuchWork,
        kind => {
            let words = error.detail().map_or_else(|| kind.to_string(), str::to_owned);
            ChatError::Refused(words.chars().take(MAX_REFUSAL_CHARACTERS).collect())
        }
    }
}

/// A template's refusal is shown to the user, and can be as long as the template likes.
const MAX_REFUSAL_CHARACTERS: usize = 1000;

fn to_value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_u64(), number.as_i64(), number.as_f64()) {
            (Some(value), ..) => Value::from(value),
            (_, Some(value), _) => Value::from(value),
            (.., value) => Value::from(value.unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(to_value).collect(),
        Json::Object(entries) => mapping(entries),
    }
}

fn mapping(entries: &Map<String, Json>) -> Value {
    Value::from_pairs(entries.iter().map(|(key, value)| match (key.as_str(), value) {
        ("arguments", Json::Object(arguments)) => (key.as_str(), Value::from_object(CallArguments(mapping(arguments)))),
        _ => (key.as_str(), to_value(value)),
    }))
}

/// The arguments of a tool call: a mapping that reads as JSON where a template prints it as if it were text.
#[derive(Debug)]
struct CallArguments(Value);

impl Object for CallArguments {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get_item(key).ok().filter(|value| !value.is_undefined())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.try_iter().into_iter().flatten().collect())
    }

    fn render(self: &Arc<Self>, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&json::Style::default().write(&self.0, &|_| Ok(())).map_err(|_| fmt::Error)?)
    }
}
