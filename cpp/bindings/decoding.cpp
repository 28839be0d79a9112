// SPDX-License-Identifier: Apache-2.0
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "decoding/answer.h"

namespace nb = nanobind;
using dflash::Answer;

using Ids = std::vector<int64_t>;
using LogitRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Choices = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AreFinite = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Candidates = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Probabilities = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutIds = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;

// Token ids of a Python `Proposals`, and whether a grammar forced them.
struct Drafts {
  explicit Drafts(nb::handle proposals) : fields(nb::cast<nb::tuple>(proposals)) {
    expect(fields.size() == 5, "proposals of 5 fields", static_cast<int64_t>(fields.size()));
    token_ids = nb::cast<Ids>(fields[0]);
    is_forced = nb::cast<bool>(fields[4]);
  }

  nb::tuple fields;
  Ids token_ids;
  bool is_forced;
};

// The distributions that proposals were drawn from, if they were.
struct Distributions {
  explicit Distributions(const nb::tuple& proposals) {
    if (proposals[1].is_none() || proposals[2].is_none()) return;
    candidates = nb::cast<Candidates>(proposals[1]);
    probabilities = nb::cast<Probabilities>(proposals[2]);
  }

  dflash::ProposalDistributions first(size_t count) const {
    if (!candidates || !probabilities) return {};
    const size_t width = candidates->shape(1);
    expect(candidates->shape(0) >= count && probabilities->shape(0) >= count && probabilities->shape(1) == width,
           "candidates and probabilities of one shape, a row for each proposal", static_cast<int64_t>(count));
    return {.tokens = {candidates->data(), count * width},
            .probabilities = {probabilities->data(), count * width},
            .width = width};
  }

  std::optional<Candidates> candidates;
  std::optional<Probabilities> probabilities;
};

static std::vector<Drafts> read_drafts(const nb::list& proposals, size_t count) {
  expect(proposals.size() == count, "as many proposals as parts", static_cast<int64_t>(proposals.size()));
  std::vector<Drafts> drafts;
  drafts.reserve(count);
  for (const nb::handle each : proposals) drafts.emplace_back(each);
  return drafts;
}

// Casts each of them; None is refused.
static std::vector<Answer*> read_answers(const nb::list& answers) {
  std::vector<Answer*> read;
  read.reserve(answers.size());
  for (const nb::handle each : answers) read.push_back(&nb::cast<Answer&>(each));
  return read;
}

// Far more than any pass has.
constexpr size_t kMaxRows = 1 << 24;

// Calls visit(part, begin, end) with the rows that tokens of a part are drawn from: the last ones of its own.
template <class Visit>
void for_each_part(const Ids& num_rows, const Ids& num_skipped, size_t total, Visit visit) {
  expect(num_skipped.size() == num_rows.size(), "skipped rows of each part", static_cast<int64_t>(num_skipped.size()));
  int64_t begin = 0;
  for (size_t part = 0; part < num_rows.size(); ++part) {
    expect(num_rows[part] >= 0 && num_rows[part] <= static_cast<int64_t>(total) - begin,
           "rows of each part within the logits", num_rows[part]);
    const int64_t end = begin + num_rows[part];
    expect(num_skipped[part] >= 0 && num_skipped[part] <= num_rows[part], "no more skipped rows than rows",
           num_skipped[part]);
    visit(part, static_cast<size_t>(begin + num_skipped[part]), static_cast<size_t>(end));
    begin = end;
  }
}

static std::vector<Ids> accept_rows(const LogitRows& logits, const Ids& num_rows, const Ids& num_skipped,
                                    const nb::list& answers, const nb::list& proposals) {
  const std::vector<Answer*> read = read_answers(answers);
  expect(read.size() == num_rows.size(), "rows of each answer", static_cast<int64_t>(num_rows.size()));
  const std::vector<Drafts> drafts = read_drafts(proposals, read.size());
  std::vector<Distributions> distributions;
  for (const Drafts& each : drafts) distributions.emplace_back(each.fields);
  std::vector<Ids> accepted(read.size());
  const auto vocab = static_cast<int64_t>(logits.shape(1));
  const nb::gil_scoped_release release;
  for_each_part(num_rows, num_skipped, logits.shape(0), [&](size_t part, size_t begin, size_t end) {
    if (begin == end) return;
    const size_t count = std::min(end - begin - 1, drafts[part].token_ids.size());
    const dflash::Logits rows{.data = logits.data() + static_cast<int64_t>(begin) * vocab,
                              .rows = static_cast<int64_t>(end - begin),
                              .vocab = vocab};
    accepted[part] = read[part]->accept(rows, std::span(drafts[part].token_ids).first(count),
                                        distributions[part].first(count));
  });
  return accepted;
}

static std::vector<Ids> accept_chosen(const Choices& choices, const AreFinite& are_finite, const Ids& num_rows,
                                      const Ids& num_skipped, const nb::list& proposals) {
  expect(are_finite.shape(0) == choices.shape(0), "as many choices as rows", static_cast<int64_t>(choices.shape(0)));
  const std::vector<Drafts> drafts = read_drafts(proposals, num_rows.size());
  std::vector<Ids> accepted(num_rows.size());
  const std::span<const int64_t> chosen{choices.data(), choices.shape(0)};
  for_each_part(num_rows, num_skipped, chosen.size(), [&](size_t part, size_t begin, size_t end) {
    const auto finite = std::span(are_finite.data(), chosen.size()).subspan(begin, end - begin);
    const auto count = static_cast<size_t>(std::ranges::find(finite, false) - finite.begin());
    const auto tokens = dflash::accept_chosen(chosen.subspan(begin, count), drafts[part].token_ids);
    accepted[part].assign(tokens.begin(), tokens.end());
  });
  return accepted;
}

static std::vector<std::tuple<size_t, std::string>> append_all(const nb::list& answers, const nb::list& proposals,
                                                               const std::vector<Ids>& accepted, double time) {
  const std::vector<Answer*> read = read_answers(answers);
  expect(accepted.size() == read.size(), "tokens of each answer", static_cast<int64_t>(accepted.size()));
  const std::vector<Drafts> drafts = read_drafts(proposals, read.size());
  constexpr std::array kNames{"", "stop", "length", "error"};
  std::vector<std::tuple<size_t, std::string>> ended;
  for (size_t i = 0; i < read.size(); ++i) {
    const dflash::Ending ending = read[i]->append(time, drafts[i].token_ids, drafts[i].is_forced, accepted[i]);
    if (ending != dflash::Ending::kNone) ended.emplace_back(i, kNames[static_cast<size_t>(ending)]);
  }
  return ended;
}

static std::tuple<Ids, Ids> next_blocks(const nb::list& answers, const Ids& lengths) {
  const std::vector<Answer*> read = read_answers(answers);
  expect(lengths.size() == read.size(), "a length for each answer", static_cast<int64_t>(lengths.size()));
  Ids anchors, limits;
  for (size_t i = 0; i < read.size(); ++i) {
    expect(!read[i]->tokens().empty(), "answers that have begun", 0);
    anchors.push_back(read[i]->tokens().back());
    limits.push_back(std::min(lengths[i], read[i]->num_left() - 1));
  }
  return {anchors, limits};
}

using PassCounts = std::tuple<bool, int64_t, int64_t, int64_t>;

static std::tuple<int64_t, std::map<PassCounts, int64_t>> last_passes(const nb::list& answers) {
  int64_t num_tokens = 0;
  std::map<PassCounts, int64_t> counts;
  for (const Answer* answer : read_answers(answers)) {
    expect(!answer->passes().empty(), "answers that have begun", 0);
    const size_t last = answer->passes().size() - 1;
    const Answer::Pass& pass = answer->passes()[last];
    const std::ptrdiff_t emitted = std::ssize(answer->tokens(last));
    num_tokens += emitted;
    if (last > 0) ++counts[{pass.is_forced, std::ssize(answer->drafts(last)), emitted, pass.num_accepted}];
  }
  return {num_tokens, counts};
}

static std::tuple<Ids, Ids> draft_counts(const nb::list& proposals, const nb::list& accepted) {
  expect(proposals.size() <= accepted.size(), "tokens of each block", static_cast<int64_t>(accepted.size()));
  std::tuple<Ids, Ids> counts;
  for (size_t i = 0; i < proposals.size(); ++i) {
    const size_t num_tokens = nb::len(nb::handle(accepted[i]));
    if (num_tokens == 0) continue;
    const auto fields = nb::cast<nb::tuple>(proposals[i]);
    const bool is_forced = nb::cast<bool>(fields[4]);
    std::get<0>(counts).push_back(is_forced ? 0 : static_cast<int64_t>(nb::len(nb::handle(fields[0]))));
    std::get<1>(counts).push_back(is_forced ? 0 : static_cast<int64_t>(num_tokens) - 1);
  }
  return counts;
}

static OutIds array(Ids ids) {
  auto* owned = new Ids(std::move(ids));
  const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<Ids*>(p); });
  return OutIds(owned->data(), {owned->size()}, owner);
}

// Slots of a pass, how many rows each of them gets, and the places of these rows.
using RowPass = std::tuple<Ids, Ids, OutIds>;

static std::vector<RowPass> row_passes(const Ids& slots, const Ids& num_rows, const Ids& num_kept, int64_t max_rows) {
  expect(slots.size() == num_rows.size(), "a slot for each part", static_cast<int64_t>(slots.size()));
  expect(num_kept.size() == num_rows.size(), "kept rows of each part", static_cast<int64_t>(num_kept.size()));
  expect(max_rows >= 1, "passes of at least one row", max_rows);
  std::vector<RowPass> passes;
  Ids owners, counts, rows;
  const auto end_pass = [&] {
    passes.emplace_back(std::exchange(owners, {}), std::exchange(counts, {}), array(std::exchange(rows, {})));
  };
  for_each_part(num_rows, Ids(num_rows.size()), kMaxRows, [&](size_t part, size_t begin, size_t) {
    expect(num_kept[part] <= num_rows[part], "no more kept rows than rows", num_kept[part]);
    for (int64_t i = 0; i < num_kept[part]; ++i) {
      if (owners.empty() || owners.back() != slots[part]) {
        owners.push_back(slots[part]);
        counts.push_back(0);
      }
      ++counts.back();
      rows.push_back(static_cast<int64_t>(begin) + i);
      if (std::ssize(rows) == max_rows) end_pass();
    }
  });
  if (!rows.empty()) end_pass();
  return passes;
}

static Ids tokens_from(const Answer& answer, size_t begin) {
  const auto tokens = answer.tokens().subspan(std::min(begin, answer.tokens().size()));
  return {tokens.begin(), tokens.end()};
}

static nb::list passes_from(const Answer& answer, size_t begin) {
  const auto ids = [](std::span<const int64_t> part) { return nb::tuple(nb::cast(Ids(part.begin(), part.end()))); };
  nb::list passes;
  for (size_t i = begin; i < answer.passes().size(); ++i) {
    const Answer::Pass& pass = answer.passes()[i];
    passes.append(nb::make_tuple(pass.time, ids(answer.tokens(i)), ids(answer.drafts(i)), pass.num_accepted,
                                 pass.is_forced));
  }
  return passes;
}

void bind_decoding(nb::module_& module) {
  nb::class_<Answer>(module, "Answer")
      .def(nb::init<const dflash::SamplerParams&, Ids, int64_t, Ids>(), nb::arg("params"), nb::arg("prompt_ids"),
           nb::arg("max_tokens"), nb::arg("stop_ids"))
      .def("__len__", [](const Answer& answer) { return answer.tokens().size(); })
      .def("token_ids", &tokens_from, nb::arg("begin") = 0)
      .def("table_of_counts", [](Answer& answer, int64_t vocab, const Ids& others) {
            return array(answer.table_of_counts(vocab, others));
          }, nb::arg("vocab"), nb::arg("others"))
      .def("passes", &passes_from, nb::arg("begin") = 0)
      .def("cut", &Answer::cut, nb::arg("num_tokens"));
  module.def("accept_rows", &accept_rows, nb::arg("logits").noconvert(), nb::arg("num_rows"), nb::arg("num_skipped"),
             nb::arg("answers"), nb::arg("proposals"));
  module.def("accept_chosen", &accept_chosen, nb::arg("choices").noconvert(), nb::arg("are_finite").noconvert(),
             nb::arg("num_rows"), nb::arg("num_skipped"), nb::arg("proposals"));
  module.def("append_all", &append_all, nb::arg("answers"), nb::arg("proposals"), nb::arg("accepted"),
             nb::arg("time"));
  module.def("next_blocks", &next_blocks, nb::arg("answers"), nb::arg("lengths"));
  module.def("last_passes", &last_passes, nb::arg("answers"));
  module.def("draft_counts", &draft_counts, nb::arg("proposals"), nb::arg("accepted"));
  module.def("row_passes", &row_passes, nb::arg("slots"), nb::arg("num_rows"), nb::arg("num_kept"),
             nb::arg("max_rows"));
}
