-- Commit: leased -> trained. ARGV: epoch, step. Reply: ok, groups, samples | no_run | fenced, epoch | not_leased
if not CFG.infra then return { 'no_run' } end
local refusal = refuse_epoch(tonumber(ARGV[1]))
if refusal then return refusal end
local groups, samples = 0, 0
for _, ordinal in ipairs(call('ZRANGE', PREFIX .. 'step:train:' .. ARGV[2], 0, -1)) do
  local group = load('train', ordinal)
  if group.state == 'leased' then
    move(group, 'trained')
    call('HSET', group.key, 'ts', ARGV[2])
    call('HDEL', group.key, 'rs')
    emit('train', 'train', ordinal, usable(group), ARGV[2], '', ARGV[1])
  end
  if not is_live(group.state) then
    groups = groups + 1
    samples = samples + usable(group)
  end
end
if groups == 0 then return { 'not_leased' } end
commit()
return { 'ok', groups, samples }
