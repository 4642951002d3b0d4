#include "ulysses/contract/error_catalogue.h"

#include <array>

#include "ulysses/base/text.h"

namespace ulysses::contract {
namespace {

using base::ErrorKind;
constexpr ErrorKind kInvalid = ErrorKind::kInvalidArgument;
constexpr ErrorKind kUnsupported = ErrorKind::kUnsupported;
constexpr ErrorKind kMismatch = ErrorKind::kRankMismatch;
constexpr ErrorKind kInternal = ErrorKind::kInternal;
constexpr ErrorKind kComm = ErrorKind::kCommunication;

constexpr std::array kEntries = std::to_array<CatalogueEntry>({
    {"CP001", kInvalid, "unknown backend_name", "no backend is registered under the policy's `backend_name`",
     "one of the names in the message, or register the backend first"},
    {"CP002", kInvalid, "another base_processor", "the policy names a base class that does not enforce it",
     "`base_processor=\"UlyssesAttentionProcessor\"`"},
    {"CP003", kInvalid, "required_checks changed", "a required check was removed or misspelt",
     "the list in the message"},
    {"CP004", kInvalid, "kv_must_be_global=False", "queries that miss other ranks' keys give wrong numbers silently",
     "`kv_must_be_global=True`"},
    {"CP005", kInvalid, "output_restore_dim is not the sequence dimension",
     "the output would be put together along heads or batch",
     "`output_restore_dim=1` for bshd, 2 for bhsd, 0 for sbhd"},
    {"CP006", kInvalid, "a size is not positive", "seq_len, cp_size, pad_multiple or a degree is 0 or negative",
     "the value in the message"},
    {"CP007", kInvalid, "the padded length overflows", "seq_len rounded up to cp_size * pad_multiple exceeds 64 bits",
     "a smaller `pad_multiple`, or `require_seq_divisible=False`"},
    {"CP010", kInvalid, "seq_len is not divisible by cp_size",
     "equal shards are required and the length does not divide",
     "pad to the length in the message, or `require_seq_divisible=False`"},
    {"CP011", kInvalid, "seq_len is not divisible by cp_size * pad_multiple",
     "shards would be equal, but no multiple of `pad_multiple`",
     "pad to the length in the message, or `pad_multiple=1`, or `require_seq_divisible=False`"},
    {"CP012", kInvalid, "lengths and layout do not fit",
     "a tensor's rows are not what the layout gives this rank, or the layout's lengths are negative, empty or too "
     "large",
     "shard with `layout.shard`, or give the layout of these rows"},
    {"CP013", kMismatch, "unequal local lengths without a layout", "the ranks pass different numbers of rows",
     "`layout=SequenceLayout.from_lengths([…])` with the lengths in the message, or `require_seq_divisible=False`"},
    {"CP014", kInvalid, "layout of another group size", "the layout was made for another number of ranks",
     "a layout with the group's `cp_size`"},
    {"CP015", kInvalid, "rank is not the caller's",
     "the layout's `cp_rank` is not the caller's rank: often a wrong `cp_group`",
     "the group for which the layout was made, or a layout with this `cp_rank`"},
    {"CP020", kInvalid, "a tensor is not 4-D", "q, k and v are [B, S_local, H, D]", "add the missing dimension"},
    {"CP021", kInvalid, "dtypes", "q, k and v are not of one floating-point dtype", "the casts in the message"},
    {"CP022", kInvalid, "devices", "q, k and v are on different devices, or on one that is neither cpu nor cuda",
     "the moves in the message"},
    {"CP023", kInvalid, "head counts", "H is not a multiple of H_kv, or one of them is 0",
     "one of the head counts in the message"},
    {"CP024", kInvalid, "shapes disagree", "q, k and v differ in batch, length, heads or head size",
     "the size in the message"},
    {"CP025", kInvalid, "softmax_scale is not finite", "NaN or infinity was passed", "`softmax_scale=None`"},
    {"CP026", kInvalid, "cp_size is not the group's size", "the argument contradicts `cp_group`",
     "leave `cp_size` out, or pass the other group"},
    {"CP027", kInvalid, "attn_mask fits no reading",
     "its shape is neither [B, S_kv] nor [B|1, H|1, S_q|1, S_kv], local or global, or its dtype is an integer",
     "one of the sizes in the message"},
    {"CP028", kInvalid, "attn_mask can be read in two ways, or not as declared",
     "a size fits the local and the global axis, `mask_layout` contradicts it, or both axes are local",
     "the `mask_layout` in the message"},
    {"CP029", kInvalid, "joint tokens do not fit",
     "other batch, heads or head size than q, k and v, or `valid_lens` outside 0 to T", "the numbers in the message"},
    {"CP030", kInvalid, "unknown strategy", "the name is not a strategy", "one of the names in the message"},
    {"CP031", kInvalid, "unknown kernel", "the name is not a kernel",
     "one of the names in the message, or `kernel=\"auto\"`"},
    {"CP032", kUnsupported, "no kernel can serve the call",
     "every kernel refuses this device, dtype or head size; the message has each reason",
     "change what the reasons name; `kernel=\"math\"` takes the most"},
    {"CP033", kInvalid, "unknown word",
     "agreement, qkv_format, kv_role, joint.position, mask_layout, causal_alignment, outer, a layout's order or a "
     "transport",
     "one of the words in the message"},
    {"CP034", kInvalid, "sinks or softcap", "sinks are not one float per query head, or softcap is not positive",
     "the shape or number in the message"},
    {"CP040", kUnsupported, "gradient of a sharded mask",
     "a mask with a local axis is gathered, and nothing sums its gradient",
     "the global mask on every rank, or `attn_mask.detach()`"},
    {"CP041", kUnsupported, "window", "no strategy here offers windowed attention", "`window=None`"},
    {"CP042", kUnsupported, "dropout", "no strategy here offers dropout", "`dropout_p=0.0`"},
    {"CP043", kUnsupported, "joint tokens with replicated K/V", "both say which keys every rank holds",
     "put the text's K and V in front of k and v, with `joint=None`"},
    {"CP044", kUnsupported, "kv_layout with replicated K/V",
     "every rank holds all keys, so nothing says who holds which", "`kv_layout=None`, or `kv_role=\"sharded\"`"},
    {"CP045", kUnsupported, "packed sequences", "cu_seqlens are not offered here", "one call per sequence"},
    {"CP047", kUnsupported, "hybrid degrees", "a 2-D group or `ulysses_degree` is not offered here",
     "`ulysses_degree=None` with a 1-D group"},
    {"CP048", kUnsupported, "bottom-right causal alignment", "`is_causal` compares global positions",
     "`causal_alignment=\"top_left\"`"},
    {"CP049", kUnsupported, "head_tail order", "only contiguous shards are offered here", "`order=\"contiguous\"`"},
    {"CP050", kUnsupported, "the backend does not declare a field that is set",
     "attend() would ignore the option and return other numbers", "leave the option out, or honour and declare it"},
    {"CP051", kInvalid, "not a UlyssesAttentionProcessor",
     "the class does not inherit the base class that enforces the policy",
     "inherit `UlyssesAttentionProcessor` and write only attend()"},
    {"CP052", kInvalid, "wrong output shape or dtype",
     "attend() or an overridden restore returned other sizes than the call needs, often the global length for the "
     "local one",
     "return the shape in the message; restore on dimension 1"},
    {"CP053", kInvalid, "K/V is not global",
     "an overridden exchange gave attend() keys that are not the other ranks' own",
     "gather K and V from every rank, or drop the override"},
    {"CP060", kMismatch, "ranks disagree", "an option, shape, dtype, policy or layout differs between ranks",
     "pass the same value on every rank; the group stays usable"},
    {"CP062", kComm, "communication failed", "a rank raised, left, came too late or called another collective",
     "look at the rank that the message names"},
    {"CP063", kInvalid, "no such process group", "no group is registered under the name",
     "call torch.distributed.init_process_group first, or pass a live group"},
    {"CP064", kInvalid, "uneven lengths without a layout under torch.compile",
     "the lengths would have to be exchanged while the graph runs", "pass `layout=`"},
    {"CP065", kUnsupported, "second or forward-mode derivative",
     "backward was asked to be differentiable (`create_graph=True`), or an input carries a tangent (`torch.func.jvp`)",
     "call backward with `create_graph=False`; use reverse mode"},
    {"CP066", kUnsupported, "new options under CUDA graph capture",
     "the ranks cannot compare them while a graph is recorded", "make the same call once before the capture"},
    {"CP067", kMismatch, "attend() failed on another rank",
     "the local attention raised there, or returned a wrong shape; seen by all under `agreement=\"always\"`",
     "repair what the named rank raised; the group stays usable"},
    {"CP068", kMismatch, "tensors differ between ranks",
     "`check_same` found other values, another dtype or shape, or a missing tensor; often a seed that only one rank "
     "set",
     "the same seed on every rank, or a broadcast; the group stays usable"},
    {"CP069", kInvalid, "arguments of a helper for training",
     "gradients that cannot be summed, a loss that is not one number, no token to average over, or no valid seed or "
     "probability",
     "what the message says"},
    {"CP070", kUnsupported, "another torch version", "the library was built for another torch than the one imported",
     "install the torch in the message, or rebuild"},
    {"CP099", kInternal, "internal error", "the Python and the C++ part of this library do not fit each other",
     "report it with the whole message"},
});

std::string_view python_exception(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
      return "ValueError";
    case ErrorKind::kUnsupported:
      return "NotImplementedError";
    default:
      return "RuntimeError";
  }
}

}  // namespace

std::span<const CatalogueEntry> error_catalogue() { return kEntries; }

const CatalogueEntry* find_error(std::string_view id) {
  for (const CatalogueEntry& entry : kEntries) {
    if (entry.id == id) return &entry;
  }
  return nullptr;
}

std::string render_errors_markdown() {
  std::string text =
      "# Errors\n\n"
      "Generated by `ulysses-check --errors`. Every message ends with its id; all violated rules are reported at once, "
      "on every rank of the group.\n\n"
      "| id | what | kind, exception | cause | fix |\n|---|---|---|---|---|\n";
  for (const CatalogueEntry& entry : kEntries) {
    text += base::cat("| ", entry.id, " | ", entry.title, " | ", base::to_string(entry.kind), ", `",
                      python_exception(entry.kind), "` | ", entry.cause, " | ", entry.fix, " |\n");
  }
  return text;
}

}  // namespace ulysses::contract
