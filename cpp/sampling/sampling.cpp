// SPDX-License-Identifier: Apache-2.0
#include "sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>

#include "sampling/filter.h"
#include "sampling/philox.h"
#include "sampling/weights.h"

namespace dflash {
namespace {

void check_vocab(int64_t vocab) {
  if (vocab >= 1 && vocab <= kMaxVocab) return;
  throw std::invalid_argument("expected rows of 1 to " + std::to_string(kMaxVocab) + " logits, found " +
                              std::to_string(vocab));
}

// Thread-local memory for one row: fresh pages from the system can cost more than sampling.
template <class T>
std::span<T> row_memory(int64_t vocab) {
  thread_local std::vector<T> memory;
  memory.resize(static_cast<size_t>(vocab));
  return memory;
}

// Turns rows of logits into distributions and distributions into tokens.
class RowSampler {
 public:
  // `counts` are those of the history, or null without a penalty.
  RowSampler(int64_t vocab, const SamplerParams& params, TokenCounts* counts)
      : params_(params), counts_(counts), weights_(row_memory<uint64_t>(vocab)) {
    if (counts_ != nullptr) penalised_ = row_memory<float>(vocab);
  }

  // Reads a row; the functions below refer to the last row read. False if it has no distribution.
  bool read(std::span<const float> logits) {
    read_ = logits;
    if (counts_ != nullptr) {
      std::ranges::copy(logits, penalised_.begin());
      counts_->penalise(penalised_, params_);
      read_ = penalised_;
    }
    const std::optional<Largest> best = largest(read_);
    if (!best) return false;
    argmax_ = best->token;
    if (is_greedy()) return true;
    to_weights(read_, best->logit, params_.temperature, weights_);
    lowest_ = lowest_kept_weight(weights_, params_);
    mass_ = mass_from(weights_, lowest_);
    return true;
  }

  // Reads a row. Throws std::invalid_argument if it has no distribution.
  void read_checked(std::span<const float> logits, int64_t row) {
    if (!read(logits)) checked_largest(read_, row);
  }

  // First token in id order at which the cumulative distribution exceeds u.
  int64_t token(uint64_t position) const {
    if (is_greedy()) return argmax_;
    const unsigned __int128 product = static_cast<unsigned __int128>(uniform_bits(params_.seed, position)) * mass_;
    const auto below = static_cast<uint64_t>(product >> kUniformBits);
    int64_t token = 0;
    for (uint64_t cumulative = kept(0); cumulative <= below; cumulative += kept(token)) ++token;
    return token;
  }

  // Whether a proposal drawn with this probability is accepted.
  bool accepts(int64_t proposal, double drawn_with, uint64_t position) const {
    const uint64_t bits = uniform_bits(params_.seed, position, Draw::kAcceptance);
    const double u = static_cast<double>(bits) / static_cast<double>(uint64_t{1} << kUniformBits);
    return u * drawn_with * static_cast<double>(mass_) < static_cast<double>(kept(proposal));
  }

  // Turns the row into max(0, p - q); keeps p if rounding makes that zero everywhere.
  void subtract(std::span<const int64_t> tokens, std::span<const double> probabilities) {
    uint64_t removed = 0;
    const auto share = [&](size_t i) {
      const double weight = std::round(probabilities[i] * static_cast<double>(mass_));
      return std::min(static_cast<uint64_t>(weight), kept(tokens[i]));
    };
    for (size_t i = 0; i < tokens.size(); ++i) removed += share(i);
    if (removed >= mass_) return;
    std::vector<uint64_t> left;
    for (size_t i = 0; i < tokens.size(); ++i) left.push_back(kept(tokens[i]) - share(i));
    for (uint64_t& weight : weights_) weight = weight >= lowest_ ? weight : 0;
    for (size_t i = 0; i < tokens.size(); ++i) weights_[static_cast<size_t>(tokens[i])] = left[i];
    lowest_ = 0;
    mass_ -= removed;
  }

  double probability(int64_t token) const {
    if (is_greedy()) return token == argmax_ ? 1 : 0;
    return static_cast<double>(kept(token)) / static_cast<double>(mass_);
  }

  void add_output(int64_t token) {
    if (counts_ != nullptr) counts_->add_output(token);
  }

 private:
  bool is_greedy() const { return params_.temperature == 0; }
  uint64_t kept(int64_t token) const {
    const uint64_t weight = weights_[static_cast<size_t>(token)];
    return weight >= lowest_ ? weight : 0;
  }

  const SamplerParams params_;
  TokenCounts* const counts_;
  std::span<uint64_t> weights_;
  std::span<float> penalised_;
  std::span<const float> read_;
  int64_t argmax_ = 0;
  uint64_t lowest_ = 0;
  uint64_t mass_ = 0;
};

void check_distributions(const ProposalDistributions& q, std::span<const int64_t> proposals, int64_t vocab) {
  const size_t width = q.width;
  if (q.tokens.size() != width * proposals.size() || q.probabilities.size() != q.tokens.size()) {
    throw std::invalid_argument("expected candidate_ids and probabilities of one shape, a row for" +
                                (" each of " + std::to_string(proposals.size())) + " proposals, found others");
  }
  check_ids("candidates", q.tokens, vocab);
  for (size_t row = 0; row < proposals.size(); ++row) {
    const auto tokens = q.tokens.subspan(row * width, width);
    const auto probabilities = q.probabilities.subspan(row * width, width);
    const auto in_range = [](double probability) { return probability >= 0 && probability <= 1; };
    if (std::ranges::count(tokens, proposals[row]) != 1) {
      throw std::invalid_argument("expected proposal " + std::to_string(row) + " once among its candidates, found " +
                                  std::to_string(proposals[row]));
    }
    if (!std::ranges::all_of(probabilities, in_range)) {
      throw std::invalid_argument("expected probabilities from 0 to 1, found others for proposal " +
                                  std::to_string(row));
    }
  }
}

// Calls read(row) for each row that is needed, and ends where it returns false.
template <class Read>
std::vector<int64_t> emit(RowSampler& sampler, Read read, int64_t num_rows, std::span<const int64_t> proposals,
                          uint64_t position, const ProposalDistributions& distributions) {
  const size_t width = distributions.width;
  std::vector<int64_t> emitted;
  bool goes_on = true;
  for (int64_t row = 0; goes_on && row < num_rows && read(row); ++row) {
    const uint64_t place = position + static_cast<uint64_t>(row);
    const bool has_proposal = row + 1 < num_rows;
    if (has_proposal && width > 0) {
      const auto begin = static_cast<size_t>(row) * width;
      const auto tokens = distributions.tokens.subspan(begin, width);
      const auto probabilities = distributions.probabilities.subspan(begin, width);
      const auto drawn = std::ranges::find(tokens, proposals[row]) - tokens.begin();
      goes_on = sampler.accepts(proposals[row], probabilities[static_cast<size_t>(drawn)], place);
      if (!goes_on) sampler.subtract(tokens, probabilities);
      emitted.push_back(goes_on ? proposals[row] : sampler.token(place));
    } else {
      emitted.push_back(sampler.token(place));
      goes_on = has_proposal && emitted.back() == proposals[row];
    }
    sampler.add_output(emitted.back());
  }
  return emitted;
}

}  // namespace

std::vector<int64_t> verify_block(const Logits& logits, std::span<const int64_t> proposals, const SamplerParams& params,
                                  uint64_t position, const History& history,
                                  const ProposalDistributions& distributions) {
  check(params);
  check_vocab(logits.vocab);
  check_ids("proposals", proposals, logits.vocab);
  const auto num_proposals = static_cast<int64_t>(proposals.size());
  if (logits.rows != num_proposals + 1) {
    throw std::invalid_argument("expected one row of logits more than proposals (" + std::to_string(num_proposals + 1) +
                                "), found " + std::to_string(logits.rows));
  }
  if (params.has_penalties() && history.output.size() != position) {
    throw std::invalid_argument("expected, for a penalty, the " + std::to_string(position) +
                                " output ids before the position, found " + std::to_string(history.output.size()));
  }
  const ProposalDistributions judged = params.temperature == 0 ? ProposalDistributions{} : distributions;
  if (judged.width > 0) check_distributions(judged, proposals, logits.vocab);
  std::optional<TokenCounts> counts;
  if (params.has_penalties()) counts.emplace(logits.vocab, history);
  RowSampler sampler(logits.vocab, params, counts ? &*counts : nullptr);
  const auto read = [&](int64_t row) {
    sampler.read_checked(logits.row(row), row);
    return true;
  };
  return emit(sampler, read, logits.rows, proposals, position, judged);
}

std::vector<int64_t> accept_block(const Logits& logits, std::span<const int64_t> proposals, const SamplerParams& params,
                                  uint64_t position, TokenCounts* counts, const ProposalDistributions& distributions) {
  check_vocab(logits.vocab);
  auto num_rows = std::min(logits.rows, static_cast<int64_t>(proposals.size()) + 1);
  const ProposalDistributions judged = params.temperature == 0 ? ProposalDistributions{} : distributions;
  if (judged.width > 0) {
    check_ids("proposals", proposals, logits.vocab);
    check_distributions(judged, proposals, logits.vocab);
    // The last proposal is judged only if a row follows.
    int64_t num_usable = 0;
    while (num_usable < num_rows && largest(logits.row(num_usable))) ++num_usable;
    num_rows = num_usable;
  }
  RowSampler sampler(logits.vocab, params, counts);
  return emit(sampler, [&](int64_t row) { return sampler.read(logits.row(row)); }, num_rows, proposals, position,
              judged);
}

void token_probabilities(std::span<const float> logits, const SamplerParams& params, const History& history,
                         std::span<double> out) {
  check(params);
  const auto vocab = static_cast<int64_t>(logits.size());
  check_vocab(vocab);
  if (out.size() != logits.size()) {
    throw std::invalid_argument("expected out of " + std::to_string(vocab) + " probabilities, found " +
                                std::to_string(out.size()));
  }
  std::optional<TokenCounts> counts;
  if (params.has_penalties()) counts.emplace(vocab, history);
  RowSampler sampler(vocab, params, counts ? &*counts : nullptr);
  sampler.read_checked(logits, 0);
  for (int64_t token = 0; token < vocab; ++token) out[token] = sampler.probability(token);
}

std::vector<double> token_logprobs(const Logits& logits, std::span<const int64_t> tokens) {
  check_vocab(logits.vocab);
  check_ids("token_ids", tokens, logits.vocab);
  if (logits.rows < static_cast<int64_t>(tokens.size())) {
    throw std::invalid_argument("expected a row of logits for each of " + std::to_string(tokens.size()) +
                                " tokens, found " + std::to_string(logits.rows));
  }
  const std::span<uint64_t> weights = row_memory<uint64_t>(logits.vocab);
  std::vector<double> logprobs;
  for (size_t row = 0; row < tokens.size(); ++row) {
    const auto row_logits = logits.row(static_cast<int64_t>(row));
    const float max = checked_largest(row_logits, static_cast<int64_t>(row)).logit;
    to_weights(row_logits, max, 1, weights);
    const double log_sum = std::log(static_cast<double>(mass_from(weights, 0)) / kMaxWeight);
    logprobs.push_back(double{row_logits[static_cast<size_t>(tokens[row])]} - max - log_sum);
  }
  return logprobs;
}

}  // namespace dflash
