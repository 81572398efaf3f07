//! Tensors of a GGUF file under the names of HF.

use crate::config::{Architecture, ROTARY_FACTORS};
use crate::{Gguf, Result, TensorInfo};

/// Conversion of stored values into HF's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transform {
    /// Nothing.
    None,
    /// Rows of a head in the order of llama.cpp: the two of a rotary pair are neighbours. HF has
    /// the first halves of all pairs before the second ones.
    RotaryPairs {
        /// Heads of the tensor.
        heads: usize,
    },
    /// One is taken off: llama.cpp stores `1 + weight`.
    MinusOne,
}

impl Transform {
    /// Returns the stored row of HF's row `row` of `rows`.
    pub fn stored_row(self, row: usize, rows: usize) -> usize {
        match self {
            Self::RotaryPairs { heads } => {
                let width = rows / heads;
                let (head, within) = (row / width, row % width);
                let half = width / 2;
                head * width + (within % half) * 2 + within / half
            }
            _ => row,
        }
    }
}

/// Tensor under its name of HF.
#[derive(Clone, Debug)]
pub struct Mapped {
    /// HF name; the file's own name if no parameter of HF has it.
    pub name: String,
    /// Place and type.
    pub info: TensorInfo,
    /// Conversion of stored values into HF's.
    pub transform: Transform,
}

/// Modules of a block by GGUF's name and HF's in most architectures.
const BLOCK: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

const OUTSIDE: [(&str, &str); 3] =
    [("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

impl Gguf {
    /// Returns the tensors under HF's names, without the rotary factors, which the config holds.
    ///
    /// # Errors
    /// If the architecture is not supported, or a tensor does not divide into its heads.
    pub fn mapped(&self) -> Result<Vec<Mapped>> {
        let architecture = self.architecture()?;
        let tensors = self.tensors().iter().filter(|info| !ROTARY_FACTORS.contains(&info.name.as_str()));
        tensors.map(|info| self.map(architecture, info)).collect()
    }

    fn map(&self, architecture: &Architecture, info: &TensorInfo) -> Result<Mapped> {
        let name = hf_name(architecture, &info.name).unwrap_or_else(|| info.name.clone());
        let is = |module: &str| name.contains(module);
        let mut transform = Transform::None;
        if architecture.permutes && (is(".q_proj.") || is(".k_proj.")) {
            let [heads, kv_heads] = self.heads(architecture)?;
            let heads = if is(".q_proj.") { heads } else { kv_heads };
            if !info.shape[0].is_multiple_of(2 * heads) {
                let reason =
                    format!("tensor {} is {:?}, not {heads} heads of even width", info.name, info.shape);
                return Err(self.error(reason));
            }
            transform = Transform::RotaryPairs { heads };
        } else if architecture.norms_from_one && info.name.ends_with("norm.weight") {
            transform = Transform::MinusOne;
        }
        Ok(Mapped { name, info: info.clone(), transform })
    }
}

fn hf_name(architecture: &Architecture, name: &str) -> Option<String> {
    let (module, kind) = name.rsplit_once('.')?;
    if !matches!(kind, "weight" | "bias") {
        return None;
    }
    let find = |table: &[(&str, &'static str)], module: &str| {
        table.iter().find(|(known, _)| *known == module).map(|(_, hf)| *hf)
    };
    let find = |table, module| find(architecture.modules, module).or_else(|| find(table, module));
    if let Some(hf) = find(&OUTSIDE, module) {
        return Some(format!("{hf}.{kind}"));
    }
    let (index, module) = module.strip_prefix("blk.")?.split_once('.')?;
    let index: usize = index.parse().ok()?;
    Some(format!("model.layers.{index}.{}.{kind}", find(&BLOCK, module)?))
}
